-- A reader has its result. Invariant: a result's body goes when the last of its readers has it; the record itself stays
-- until its TTL, so that a late duplicate is still known. KEYS: inc record   ARGV: inc reader blob_prefix
-- Replies: OK
local record = KEYS[2]
local refusal = wrong_type({record, 'hash'})
if refusal then return refusal end
local r = redis.call('HMGET', record, 'state', 'to', 'rblob')
if r[1] ~= 'done' then return {'OK'} end
local rest = {}
for reader in string.gmatch(r[2] or '', '%S+') do
  if reader ~= ARGV[2] then rest[#rest + 1] = reader end
end
redis.call('HDEL', record, 'to')
if #rest > 0 then
  redis.call('HSET', record, 'to', table.concat(rest, ' '))
else
  redis.call('HDEL', record, 'rbody', 'rblob')
  redis.call('HSET', record, 'dropped', 1)
  if r[3] then redis.call('UNLINK', ARGV[3] .. r[3]) end
end
return {'OK'}
