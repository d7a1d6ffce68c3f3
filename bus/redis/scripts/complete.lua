-- Ends a command: acknowledges, keeps the result, counts, publishes and answers in one step, so that a crash before it
-- means replay and after it means done. Invariants: only the current epoch can; once done stays as it was done; a
-- model's commands end in the order of seq; event numbers of a life rise by one.
-- KEYS: inc meta cmd evt record ebell dead result_blob(or inc)
-- ARGV: inc model epoch entry id header body blob size keep(0|1) ttl_s evt_cap lane(0|1) dead(0|1) closes(0|1)
--       inbox_prefix blob_prefix
-- Replies: OK n | FENCED epoch owner | GONE | ENTRY entry | ORDER applied seq | BLOB
local meta, cmd, evt, record = KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local model, epoch, entry, id, header = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local body, blob, size, keep, ttl = ARGV[7], ARGV[8], ARGV[9], ARGV[10] == '1', tonumber(ARGV[11])
local lane, dead, closes = ARGV[13] == '1', ARGV[14] == '1', ARGV[15] == '1'
local refusal = wrong_type({meta, 'hash', cmd, 'stream', evt, 'stream', record, 'hash', KEYS[6], 'stream', KEYS[7], 'stream'})
  or fenced(meta, epoch)
if refusal then return refusal end
local r = redis.call('HMGET', record, 'state', 'entry', 'seq', 'to', 'n', 'blob', 'model', 'kind')
if not r[1] or r[7] ~= model then return {'GONE'} end
if r[2] ~= entry then return {'ENTRY', r[2] or ''} end
if r[1] == 'done' then return {'OK', tonumber(r[5])} end
local m = redis.call('HMGET', meta, 'state', 'applied', 'born')
local seq, applied = tonumber(r[3]), tonumber(m[2])
-- A queue that is being drained after its unload may have holes where early commands waited.
if not lane and (seq <= applied or (seq ~= applied + 1 and m[1] == 'live')) then return {'ORDER', applied, seq} end
if blob ~= '' and redis.call('EXISTS', KEYS[8]) == 0 then return {'BLOB'} end
-- A reply stream of the wrong type is its owner's loss: the record and the event still tell.
local readers = {}
for reader in string.gmatch(r[4] or '', '%S+') do
  local inbox = ARGV[16] .. reader
  if not wrong_type({inbox, 'stream'}) then readers[#readers + 1] = inbox end
end
local command = dead and redis.call('XRANGE', cmd, entry, entry)[1]

redis.call('XACK', cmd, GROUP, entry) -- frees memory, so that a full server does not refuse the rest
if not keep then
  redis.call('XDEL', cmd, entry)
  if r[6] then redis.call('UNLINK', ARGV[17] .. r[6]) end
end
redis.call('HDEL', record, 'blob', 'size')
local n = redis.call('HINCRBY', meta, 'n', 1)
redis.call('HSET', record, 'state', 'done', 'n', n, 'event', header, 'rsize', size)
if blob ~= '' then
  redis.call('HSET', record, 'rblob', blob)
  redis.call('EXPIRE', KEYS[8], ttl)
elseif size ~= '0' then
  redis.call('HSET', record, 'rbody', body)
end
redis.call('EXPIRE', record, ttl)
if not lane then redis.call('HSET', meta, 'applied', int(seq)) end
redis.call('HINCRBY', meta, 'backlog', -1)
if closes then redis.call('HSET', meta, 'state', 'unloaded') end
redis.call('XADD', evt, 'MAXLEN', '~', ARGV[12], m[3] .. '-' .. int(n), 'id', id, 'n', n, 'seq', int(seq), 'kind', r[8],
  'at', int(now_ms()), 'header', header)
redis.call('XADD', KEYS[6], 'MAXLEN', '~', 1000, '*', 'm', model)
for _, inbox in ipairs(readers) do
  if blob == '' then
    redis.call('XADD', inbox, '*', 'id', id, 'n', n, 'seq', int(seq), 'header', header, 'size', size, 'body', body)
  else
    redis.call('XADD', inbox, '*', 'id', id, 'n', n, 'seq', int(seq), 'header', header, 'size', size)
  end
  redis.call('EXPIRE', inbox, ttl)
end
if dead then
  local reason = {'XADD', KEYS[7], 'MAXLEN', '~', 1000, '*', 'model', model, 'id', id, 'seq', int(seq), 'event', header}
  if command then
    for at = 1, #command[2], 2 do
      if command[2][at] == 'header' then
        reason[#reason + 1] = 'command'
        reason[#reason + 1] = command[2][at + 1]
      end
    end
  end
  redis.call(unpack(reason))
end
return {'OK', n}
