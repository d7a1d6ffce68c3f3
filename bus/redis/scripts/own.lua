-- Takes a model. Invariants: at most one running lease a model, by the server's clock; every taking gets an epoch that
-- no owner of any model ever had.
-- KEYS: inc meta cmd evt models epoch   ARGV: inc model owner lease_ms lane(0|1)
-- Replies: OK epoch | HELD owner ms_left | UNKNOWN
local meta, cmd, evt, models = KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local refusal = wrong_type({meta, 'hash', cmd, 'stream', evt, 'stream', models, 'set', KEYS[6], 'string'})
if refusal then return refusal end
local m = redis.call('HMGET', meta, 'state', 'owner', 'lease')
if ARGV[5] ~= '1' and (not m[1] or m[1] == 'freed') then return {'UNKNOWN'} end
local now = now_ms()
local left = tonumber(m[3] or '0') - now
if m[2] and m[2] ~= ARGV[3] and left > 0 then return {'HELD', m[2], left} end

redis.call('HDEL', meta, 'owner', 'lease') -- frees memory, so that a full server does not refuse the rest
if not m[1] then
  give_birth(meta, cmd, evt)
  redis.call('SADD', models, ARGV[2])
end
local epoch = redis.call('INCR', KEYS[6])
redis.call('HSET', meta, 'owner', ARGV[3], 'epoch', epoch, 'lease', int(now + tonumber(ARGV[4])))
return {'OK', epoch}
