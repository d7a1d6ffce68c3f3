-- Put before every script. Invariants: nothing is written into another life of the data than the caller's
-- (KEYS[1] holds the incarnation, ARGV[1] the caller's), and nothing is written before every check has passed.
local GROUP, OWNER = 'tinsmith', 'owner'
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'LOST'} end

-- The refusal when a key holds another type than it should; nil when all is well.
local function wrong_type(expected)
  for at = 1, #expected, 2 do
    local key, kind = expected[at], expected[at + 1]
    local got = redis.call('TYPE', key)['ok']
    if got ~= 'none' and got ~= kind then return {'TYPE', key, kind, got} end
  end
end

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function int(number) return string.format('%.0f', number) end

-- The refusal when the caller's epoch is not the model's; nil when it is.
local function fenced(meta, epoch)
  local held = redis.call('HMGET', meta, 'epoch', 'owner')
  if held[1] ~= epoch then return {'FENCED', held[1] or '0', held[2] or ''} end
end

-- Gives a queue its first life or its next one. Lives are numbered by their birth in ms, always rising, because
-- event ids are <birth>-<n> and a stream takes rising ids only.
local function give_birth(meta, cmd, evt)
  local born = now_ms()
  local old = tonumber(redis.call('HGET', meta, 'born') or '0')
  if old >= born then born = old + 1 end
  if redis.call('EXISTS', evt) == 1 then
    local info = redis.call('XINFO', 'STREAM', evt)
    for at = 1, #info, 2 do
      if info[at] == 'last-generated-id' then
        local last = tonumber(string.match(info[at + 1], '^%d+'))
        if last >= born then born = last + 1 end
      end
    end
    redis.call('PERSIST', evt)
  end
  redis.call('HSET', meta, 'state', 'live', 'born', int(born), 'n', 0, 'seq', -1, 'applied', -1, 'snapshot', -1, 'backlog', 0)
  redis.call('PERSIST', meta)
  redis.call('DEL', cmd)
  redis.call('XGROUP', 'CREATE', cmd, GROUP, '0', 'MKSTREAM')
end
-- The script itself:
