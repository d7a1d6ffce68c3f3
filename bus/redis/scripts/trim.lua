-- Shortens the redo log to what the newest durable snapshot does not hold. Invariants: nothing that is not completed is
-- deleted; the snapshot's position is written before the first entry goes, and never falls.
-- KEYS: inc meta cmd   ARGV: inc epoch upto_seq most blob_prefix
-- Replies: OK deleted more(0|1) | FENCED epoch owner | AHEAD applied
local meta, cmd, upto, most = KEYS[2], KEYS[3], tonumber(ARGV[3]), tonumber(ARGV[4])
local refusal = wrong_type({meta, 'hash', cmd, 'stream'}) or fenced(meta, ARGV[2])
if refusal then return refusal end
local m = redis.call('HMGET', meta, 'applied', 'snapshot')
if upto > tonumber(m[1]) then return {'AHEAD', tonumber(m[1])} end
local doomed, blobs, more = {}, {}, 0
for _, entry in ipairs(redis.call('XRANGE', cmd, '-', '+', 'COUNT', most)) do
  local values = {}
  for at = 1, #entry[2], 2 do values[entry[2][at]] = entry[2][at + 1] end
  if tonumber(values.seq) > upto then break end
  doomed[#doomed + 1] = entry[1]
  if values.blob then blobs[#blobs + 1] = ARGV[5] .. values.blob end
end
redis.call('HDEL', meta, 'none') -- frees nothing, but lets the next write pass when memory is full
if upto > tonumber(m[2]) then redis.call('HSET', meta, 'snapshot', int(upto)) end
for _, entry in ipairs(doomed) do redis.call('XDEL', cmd, entry) end
for _, blob in ipairs(blobs) do redis.call('UNLINK', blob) end
if #doomed == most then more = 1 end
return {'OK', #doomed, more}
