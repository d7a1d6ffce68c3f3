-- Lets go of a drained queue. Invariant: nothing accepted is left without its answer. The name may be created again;
-- events and position stay for a while, for those who read late.
-- KEYS: inc meta cmd parked evt models   ARGV: inc epoch model ttl_s
-- Replies: OK | FENCED epoch owner | LEFT backlog
local meta = KEYS[2]
local refusal = wrong_type({meta, 'hash', KEYS[3], 'stream', KEYS[4], 'hash', KEYS[5], 'stream', KEYS[6], 'set'})
  or fenced(meta, ARGV[2])
if refusal then return refusal end
local m = redis.call('HMGET', meta, 'state', 'backlog')
if m[1] ~= 'unloaded' or tonumber(m[2]) > 0 then return {'LEFT', tonumber(m[2])} end
redis.call('DEL', KEYS[3], KEYS[4])
redis.call('HDEL', meta, 'owner', 'lease')
redis.call('HSET', meta, 'state', 'freed')
redis.call('EXPIRE', meta, ARGV[4])
redis.call('EXPIRE', KEYS[5], ARGV[4])
redis.call('SREM', KEYS[6], ARGV[3])
return {'OK'}
