-- read-write: many readers or one writer per name. Each hold is a lease with a fencing token; who waits stands in a queue,
-- and a writer in it holds back the readers that come after.
--
-- KEYS  1 hold     sorted set: the holders' ids (their 34th letter: r or w), by their end, Unix ms; PX: the last of them
--       2 fence    string: F, the highest token this node knows of for the name
--       3 queue    sorted set: who waits, by order key
--       4 tickets  hash: random part of a waiter's id -> number, fresh until, ends (Unix ms), span
--       5 undone   string: the tombstone of this id; where it is, the id is never granted (again)
-- ARGV  as of the mutex; 8: readers keep the order of the queue, with an f or without
-- returns as the mutex does; the holder of {0, pttl, holder, ...} is the one that ends last
--
-- No shebang: under OOM a script with one is refused whole, and release and extend must go on.
local hold, fence, queue, tickets, undone = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local verb, id, lease, span = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[9])
local time = redis.call('TIME')
local us, order = time[1] * 1000000 + time[2], 0
local now = math.floor(us / 1000)
local first = redis.call('ZRANGE', hold, 0, 0)[1]
if first and not string.match(string.sub(first, 34, 34), '[rw]') then return redis.error_reply('WRONGTYPE another kind') end
if first then redis.call('ZREMRANGEBYSCORE', hold, '-inf', now) end
local f, score = tonumber(redis.call('GET', fence)) or 0, redis.call('ZSCORE', hold, id)

local function no(rank)
  local last = redis.call('ZRANGE', hold, -1, -1, 'WITHSCORES')
  if not last[1] then return {0, -2, '', rank, order} end
  return {0, last[2] - now, last[1], rank, order}
end

-- Its end moves forward only; pcall here and below: OOM must not stop an extend or a release.
local function keep(who, ends)
  redis.pcall('ZADD', hold, string.format('%.0f', ends), who)
  if redis.call('PTTL', hold) < ends - now then redis.call('PEXPIRE', hold, string.format('%.0f', ends - now)) end
end

if verb == 'extend' then
  if f < tonumber(ARGV[4]) then
    if not redis.pcall('SET', fence, ARGV[4], 'PX', ARGV[5]).err then f = tonumber(ARGV[4]) end
  elseif ARGV[4] ~= '0' then
    redis.call('PEXPIRE', fence, ARGV[5])
  end
  if not score then return no(-1) end
  if lease > 0 and tonumber(score) < now + lease then keep(id, now + lease) end
  return {1, f}
end

if verb ~= 'release' and redis.call('EXISTS', undone) == 1 then return {-1} end
local serving, number, fresh, asked = string.sub(ARGV[8], 1, 1), string.match(ARGV[11], '(%S+) (%S+) (%S+)')
local waiter, woken = ARGV[10] ~= '' and ARGV[10] or id, false

-- Whether one more may stand beside the holders, and beside whom we woke: a writer is alone, so one holder tells.
local function admits(who)
  local found, mode = redis.call('ZRANGE', hold, 0, 0)[1], string.sub(who, 34, 34)
  return (not found or (mode == 'r' and string.sub(found, 34, 34) == 'r')) and (not woken or mode .. woken == 'rr')
end

-- So many heard it; false: no permission to publish.
local function tell(to, its, token, left)
  local told = string.format('%s %s %.0f %s ', string.sub(to, 1, 32), its, token, left) .. hold
  local heard = redis.pcall('PUBLISH', 'asynclock~' .. string.sub(to, 1, 12), told)
  return type(heard) == 'number' and heard
end

local function drop(who)
  redis.call('ZREM', queue, who)
  redis.call('HDEL', tickets, string.sub(who, 1, 32))
end

local function enqueue()
  if not number then return end
  order = tonumber(asked)
  if order == 0 then order = us end
  if number == '1' then order = math.min(math.max(order, us - 10000000), us + 10000000) end
  local ticket = string.format('%s %.0f %.0f %s', number, now + fresh, now + lease, span)
  redis.call('ZADD', queue, string.format('%.0f', order), waiter)
  redis.call('HSET', tickets, string.sub(waiter, 1, 32), ticket)
  if redis.call('PTTL', queue) < lease then
    redis.call('PEXPIRE', queue, lease)
    redis.call('PEXPIRE', tickets, lease)
  end
end

-- How the head fares: it 'waits' on, is 'gone' (stale or deaf), 'woken', 'let in', or 'silent': we may not tell it.
local function served(head, left)
  local ticket = redis.call('HGET', tickets, string.sub(head, 1, 32)) or '0 0 0 0'
  local number, fresh, ends, wants = string.match(ticket, '(%S+) (%S+) (%S+) (%S+)')
  if tonumber(fresh) <= now or redis.call('ZSCORE', hold, head) then return 'gone' end
  if not admits(head) then return 'waits' end
  if serving == '1' or wants == '0' then
    local heard = tell(head, number, 0, left)
    return not heard and 'silent' or heard > 0 and 'woken' or 'gone'
  end
  local top = math.max(f + 1, us) + (wants - 1)
  if redis.pcall('SET', fence, string.format('%.0f', top), 'PX', ARGV[5]).err then return 'silent' end
  f = top
  keep(head, tonumber(ends))
  local heard = tell(head, number, f, left)
  if heard and heard > 0 then return 'let in' end
  redis.call('ZREM', hold, head)  -- what nobody was told is taken back
  return heard and 'gone' or 'silent'
end

-- True: it is the turn of `whose`, or nobody is left, and it may enter; nil: nobody asks.
local function serve(whose)
  if serving == '0' then return false end
  local at = 0
  for nth = 1, 64 do
    local head = redis.call('ZRANGE', queue, at, at)[1]
    if not head or head == whose then return whose and admits(id) end
    local how = served(head, nth > 56 and -3 or -1)  -- -3: the last go on, once they are in
    if how == 'waits' or how == 'silent' then return false end
    if how == 'woken' then
      woken = string.sub(head, 34, 34)
      at = at + 1
    else
      drop(head)
    end
  end
  return false
end

if verb == 'release' then
  if f < tonumber(ARGV[4]) and not redis.pcall('SET', fence, ARGV[4], 'PX', ARGV[5]).err then f = tonumber(ARGV[4]) end
  if ARGV[7] == '1' then redis.pcall('SET', undone, '', 'PX', lease) end
  local reply = no(-1)
  drop(id)
  if score then
    reply = {1, f}
    redis.call('ZREM', hold, id)
  end
  if score and ARGV[6] ~= '0' then
    keep('~' .. string.sub(id, 2), now + ARGV[6])
    local head = redis.call('ZRANGE', queue, 0, 0)[1]
    local ticket = head and redis.call('HGET', tickets, string.sub(head, 1, 32))
    if ticket then tell(head, string.match(ticket, '%S+'), 0, ARGV[6]) end
  else
    serve()
  end
  enqueue()
  return reply
end

if verb == 'break' then
  local found = redis.call('ZRANGE', hold, 0, -1)
  if not found[1] then return no(-1) end
  for _, each in ipairs(found) do
    if string.match(each, '^%x+()|') == 33 then tell(each, 0, 0, -2) end
  end
  redis.call('DEL', hold)
  local reply = {1, f}
  serve()
  return reply
end

local adopted = verb == 'adopt' and not score and redis.call('ZSCORE', hold, waiter)
if verb == 'adopt' and not score and not adopted then return no(-1) end

if verb == 'wait' or not (score or adopted) then
  local enter = verb == 'acquire' and admits(id)
  local turn = enter and string.sub(id, 34, 34) == 'r' and redis.call('EXISTS', queue) == 1
  if turn or not enter then enqueue() end
  if turn or verb == 'wait' then enter = serve(waiter) end
  if not enter or verb == 'wait' then
    local rank = number and redis.call('ZRANK', queue, waiter) or -1
    return enter and {0, -2, '', rank, order} or no(rank)
  end
  drop(waiter)
end

-- Fence first, hold last: whatever fails between leaves nothing that blocks.
if f == 0 or not score then
  f = math.max(f + 1, math.min(math.max(tonumber(ARGV[4]), us - 10000000), us + 10000000)) + (span - 1)
  redis.call('SET', fence, string.format('%.0f', f), 'PX', ARGV[5])
end
local ends = math.max(now + lease, tonumber(score or adopted or 0))
redis.call('ZADD', hold, string.format('%.0f', ends), id)
if adopted then redis.call('ZREM', hold, waiter) end
if redis.call('PTTL', hold) < lease then redis.call('PEXPIRE', hold, lease) end
return {1, f}
