"""What travels over HTTP as protobuf, and its way to and from datums, events and bodies."""
