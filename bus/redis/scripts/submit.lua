-- Accepts one command. Invariants: one record for a command id, whatever is retried; the entries of a model stand in
-- its stream in the order of their seq, without a hole; backlog counts the entries that are not completed.
-- KEYS: inc meta cmd parked evt record models bell blob(or inc) inbox(or inc)
-- ARGV: inc model id seq kind digest header body blob size reader cap lane(0|1) record_prefix
-- Replies: OK state seq | DUP state seq n event | CONFLICT | SEQ next | BUSY backlog | UNKNOWN | EXISTS | CLOSING | BLOB
local meta, cmd, parked, evt, record, models, bell = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local model, id, seq, kind, digest = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], ARGV[6]
local header, body, blob, size, reader = ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11]
local cap, lane, record_prefix = tonumber(ARGV[12]), ARGV[13] == '1', ARGV[14]

local refusal = wrong_type({meta, 'hash', cmd, 'stream', parked, 'hash', evt, 'stream', record, 'hash',
  models, 'set', bell, 'stream'})
if refusal then return refusal end
if reader ~= '' then
  refusal = wrong_type({KEYS[10], 'stream'})
  if refusal then return refusal end
end

local known = redis.call('HMGET', record, 'digest', 'state', 'seq', 'n', 'event', 'to', 'rsize', 'dropped')
if known[1] then
  if known[1] ~= digest then return {'CONFLICT'} end
  local to = known[6] or ''
  if reader ~= '' and not known[8] and not string.find(' ' .. to .. ' ', ' ' .. reader .. ' ', 1, true) then
    redis.call('HDEL', record, 'none') -- frees nothing, but lets the next write pass when memory is full
    redis.call('HSET', record, 'to', to == '' and reader or to .. ' ' .. reader)
  end
  return {'DUP', known[2], tonumber(known[3]), tonumber(known[4] or '0'), known[5] or ''}
end

local m = redis.call('HMGET', meta, 'state', 'seq', 'backlog')
local fresh = not m[1] or m[1] == 'freed'
if lane then
  if seq ~= -1 then return {'SEQ', -1} end
elseif kind == 'create_model' then
  if m[1] == 'live' then return {'EXISTS'} end
  if m[1] == 'unloaded' then return {'CLOSING'} end
  if seq > 0 then return {'SEQ', 0} end
elseif m[1] ~= 'live' then
  return {'UNKNOWN'}
end
if blob ~= '' and redis.call('EXISTS', KEYS[9]) == 0 then return {'BLOB'} end

local next_seq, backlog = 0, 0
if not fresh then next_seq, backlog = tonumber(m[2]) + 1, tonumber(m[3]) end
if seq == -1 then seq = next_seq end
if seq < next_seq then return {'SEQ', next_seq} end
local early = seq > next_seq
if early then
  if redis.call('HEXISTS', parked, int(seq)) == 1 then return {'SEQ', next_seq} end
  -- Only early ones count what is parked: the command that closes the gap must always find room.
  backlog = backlog + redis.call('HLEN', parked)
end
if backlog >= cap then return {'BUSY', backlog} end

-- Every check has passed. The first write is one that a full server refuses.
local fields = {'HSET', record, 'digest', digest, 'model', model, 'kind', kind, 'seq', int(seq), 'to', reader,
  'state', early and 'parked' or 'queued'}
if blob ~= '' then
  for _, field in ipairs({'blob', blob, 'size', size}) do fields[#fields + 1] = field end
end
redis.call(unpack(fields))
if blob ~= '' then redis.call('PERSIST', KEYS[9]) end
if early then
  redis.call('HSET', record, 'header', header, 'body', body)
  redis.call('HSET', parked, int(seq), id)
  return {'OK', 'parked', seq}
end
if fresh then give_birth(meta, cmd, evt) end

local function append(id, seq, header, body, blob, size, reader)
  local entry
  if blob and blob ~= '' then
    entry = redis.call('XADD', cmd, '*', 'id', id, 'seq', int(seq), 'header', header, 'blob', blob, 'size', size, 'reply_to', reader)
  else
    entry = redis.call('XADD', cmd, '*', 'id', id, 'seq', int(seq), 'header', header, 'body', body, 'reply_to', reader)
  end
  redis.call('HSET', record_prefix .. id, 'state', 'queued', 'entry', entry)
end

append(id, seq, header, body, blob, size, reader)
local last, added = seq, 1
while true do
  local follower = redis.call('HGET', parked, int(last + 1))
  if not follower then break end
  last, added = last + 1, added + 1
  local p = redis.call('HMGET', record_prefix .. follower, 'header', 'body', 'blob', 'size', 'to')
  append(follower, last, p[1], p[2], p[3], p[4], string.match(p[5] or '', '^%S*'))
  redis.call('HDEL', record_prefix .. follower, 'header', 'body')
  redis.call('HDEL', parked, int(last))
end
redis.call('HSET', meta, 'seq', int(last))
redis.call('HINCRBY', meta, 'backlog', added)
redis.call('SADD', models, model)
redis.call('XADD', bell, 'MAXLEN', '~', 1000, '*', 'm', model)
return {'OK', 'queued', seq}
