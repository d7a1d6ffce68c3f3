-- Takes the next commands of a model. Invariant: what was taken and not completed comes again, oldest first, before
-- anything new; the caller's cursor is the last entry it has seen, so an answer that was lost strands nothing.
-- KEYS: inc meta cmd   ARGV: inc epoch cursor count
-- Replies: OK [[entry, deliveries, [field, value, ...]], ...] | FENCED epoch owner
local meta, cmd, count = KEYS[2], KEYS[3], tonumber(ARGV[4])
local refusal = wrong_type({meta, 'hash', cmd, 'stream'}) or fenced(meta, ARGV[2])
if refusal then return refusal end
local taken = {}
local function read(from, most)
  local reply = redis.call('XREADGROUP', 'GROUP', GROUP, OWNER, 'COUNT', most, 'STREAMS', cmd, from)
  if not reply then return end
  for _, entry in ipairs(reply[1][2]) do taken[#taken + 1] = {entry[1], 0, entry[2]} end
end
if redis.call('EXISTS', cmd) == 0 then return {'OK', taken} end
read(ARGV[3], count)
if #taken < count then read('>', count - #taken) end
if #taken == 0 then return {'OK', taken} end
local deliveries = {}
for _, p in ipairs(redis.call('XPENDING', cmd, GROUP, taken[1][1], taken[#taken][1], #taken)) do
  deliveries[p[1]] = p[4]
end
for _, entry in ipairs(taken) do entry[2] = deliveries[entry[1]] or 0 end
return {'OK', taken}
