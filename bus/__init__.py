"""The bus: commands in, events out, over Redis streams. Knows Redis and msgpack; nothing of torch, Ray or HTTP.

Import from the modules: `connection.open_bus` is the way in, `streams.Bus` what it gives, `streams` the layout.
"""
