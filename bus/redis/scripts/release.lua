-- Ends a lease early. Invariant: the epoch stays, so that the next owner gets a higher one.
-- KEYS: inc meta   ARGV: inc epoch
-- Replies: OK | FENCED epoch owner
local refusal = wrong_type({KEYS[2], 'hash'}) or fenced(KEYS[2], ARGV[2])
if refusal then return refusal end
redis.call('HDEL', KEYS[2], 'owner', 'lease')
return {'OK'}
