-- Writes one chunk of a blob. Invariant: a blob that nothing refers to yet goes by itself after its TTL. Results are
-- stored even when memory is full (forced), commands are not. KEYS: inc blob   ARGV: inc forced(0|1) ttl_s chunk bytes
-- Replies: OK
local refusal = wrong_type({KEYS[2], 'hash'})
if refusal then return refusal end
if ARGV[2] == '1' then redis.call('HDEL', KEYS[2], 'none') end
redis.call('HSET', KEYS[2], ARGV[4], ARGV[5])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return {'OK'}
