"""How it travels: connections to a Redis or Valkey server, key names, Lua scripts, blobs, the embedded server."""
