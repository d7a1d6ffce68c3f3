-- Prolongs a lease. Invariant: only the owner of the current epoch can.
-- KEYS: inc meta   ARGV: inc epoch lease_ms
-- Replies: OK | FENCED epoch owner
local refusal = wrong_type({KEYS[2], 'hash'}) or fenced(KEYS[2], ARGV[2])
if refusal then return refusal end
redis.call('HDEL', KEYS[2], 'lease') -- frees memory, so that a full server does not refuse the rest
redis.call('HSET', KEYS[2], 'lease', int(now_ms() + tonumber(ARGV[3])))
return {'OK'}
