-- Closes a model's queue and brings in what came early, so that every accepted command can be answered.
-- Invariant: after it no command is accepted, and every accepted one stands in the stream, in the order of seq.
-- KEYS: inc meta cmd parked   ARGV: inc epoch record_prefix
-- Replies: OK backlog | FENCED epoch owner
local meta, cmd, parked, record_prefix = KEYS[2], KEYS[3], KEYS[4], ARGV[3]
local refusal = wrong_type({meta, 'hash', cmd, 'stream', parked, 'hash'}) or fenced(meta, ARGV[2])
if refusal then return refusal end
redis.call('HDEL', meta, 'none') -- frees nothing, but lets the next write pass when memory is full
redis.call('HSET', meta, 'state', 'unloaded')
local seqs = redis.call('HKEYS', parked)
table.sort(seqs, function(a, b) return tonumber(a) < tonumber(b) end)
for _, seq in ipairs(seqs) do
  local id = redis.call('HGET', parked, seq)
  local record = record_prefix .. id
  local p = redis.call('HMGET', record, 'header', 'to', 'blob', 'size', 'body')
  local reader = string.match(p[2] or '', '^%S*')
  local entry
  if p[3] then
    entry = redis.call('XADD', cmd, '*', 'id', id, 'seq', seq, 'header', p[1], 'blob', p[3], 'size', p[4], 'reply_to', reader)
  else
    entry = redis.call('XADD', cmd, '*', 'id', id, 'seq', seq, 'header', p[1], 'body', p[5], 'reply_to', reader)
  end
  redis.call('HSET', record, 'state', 'queued', 'entry', entry)
  redis.call('HDEL', record, 'header', 'body')
  redis.call('HDEL', parked, seq)
  redis.call('HSET', meta, 'seq', seq)
end
if #seqs > 0 then redis.call('HINCRBY', meta, 'backlog', #seqs) end
return {'OK', tonumber(redis.call('HGET', meta, 'backlog'))}
