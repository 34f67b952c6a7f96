-- inspect: the state of one name of any kind at this server. It writes nothing.
--
-- KEYS  1 hold, 2 fence, 3 queue, 4 tickets
-- returns {type of hold (zset without holders: it is another program's), [holder, ms left; -1: no end]..., F or '', [waiter, order key, ticket or '']...}, each list flat
local holds, kind = {}, redis.call('TYPE', KEYS[1]).ok
if kind == 'string' then
  local holder = redis.call('GETRANGE', KEYS[1], 0, 1023)
  if string.byte(holder) == 43 then holder = string.sub(holder, 2) end
  holds = {holder, redis.call('PTTL', KEYS[1])}
elseif kind == 'zset' then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local found = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
  local ours = string.match(string.gsub(found[1], '^~', '0'), '^%x+()[|!]') == 33
  for i = 1, #found, 2 do
    if ours and tonumber(found[i + 1]) > now then
      holds[#holds + 1] = found[i]
      holds[#holds + 1] = found[i + 1] - now
    end
  end
  if ours and not holds[1] then kind = 'none' end
end
local waiters, queue = {}, redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
for i = 1, #queue, 2 do
  waiters[#waiters + 1] = queue[i]
  waiters[#waiters + 1] = queue[i + 1]
  waiters[#waiters + 1] = redis.call('HGET', KEYS[4], string.sub(queue[i], 1, 32)) or ''
end
return {kind, holds, redis.call('GET', KEYS[2]) or '', waiters}
