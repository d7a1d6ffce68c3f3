-- Says what became of a command, and puts the reader on the list of those to answer when it is not done yet (no reader:
-- only says). KEYS: inc record   ARGV: inc reader
-- Replies: NONE | WAIT state | DONE n seq event size body blob dropped(0|1)
local record, reader = KEYS[2], ARGV[2]
local refusal = wrong_type({record, 'hash'})
if refusal then return refusal end
local r = redis.call('HMGET', record, 'state', 'to', 'n', 'seq', 'event', 'rsize', 'rbody', 'rblob', 'dropped')
if not r[1] then return {'NONE'} end
local to = r[2] or ''
if reader ~= '' and not r[9] and not string.find(' ' .. to .. ' ', ' ' .. reader .. ' ', 1, true) then
  redis.call('HDEL', record, 'none') -- frees nothing, but lets the next write pass when memory is full
  redis.call('HSET', record, 'to', to == '' and reader or to .. ' ' .. reader)
end
if r[1] ~= 'done' then return {'WAIT', r[1]} end
return {'DONE', tonumber(r[3]), tonumber(r[4]), r[5], tonumber(r[6]), r[7] or '', r[8] or '', r[9] and 1 or 0}
