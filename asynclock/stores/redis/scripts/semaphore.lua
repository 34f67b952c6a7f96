-- semaphore: as many holders per name as the one who asks has permits. Each hold is a lease with a fencing token; who
-- waits stands in a queue.
--
-- KEYS  1 hold     sorted set: the holders' ids, by their end, Unix ms; PX: the last of them. After the 33rd letter of
--                  an id stands its "s<permits>/<slot>."; over N nodes each hold has a slot of its own by majority; at
--                  a node alone there are none, nor has a ticket one
--       2 fence    string: F, the highest token this node knows of for the name
--       3 queue    sorted set: who waits, by order key
--       4 tickets  hash: random part of a waiter's id -> number, fresh until, ends (Unix ms), span
--       5 undone   string: the tombstone of this id; where it is, the id is never granted (again)
-- ARGV  as of the mutex; 8: no f
-- returns as the mutex does; the holder of {0, pttl, holder, rank, order, taken} is the one that ends first, and taken are
--         the slots in use, with spaces between
--
-- No shebang: under OOM a script with one is refused whole, and release and extend must go on.
local hold, fence, queue, tickets, undone = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local verb, id, lease, span = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[9])
local time = redis.call('TIME')
local us, order = time[1] * 1000000 + time[2], 0
local now = math.floor(us / 1000)
local first = redis.call('ZRANGE', hold, 0, 0)[1]
if first and string.sub(first, 34, 34) ~= 's' then return redis.error_reply('WRONGTYPE another kind') end
if first then redis.call('ZREMRANGEBYSCORE', hold, '-inf', now) end
local f, score = tonumber(redis.call('GET', fence)) or 0, redis.call('ZSCORE', hold, id)

-- The permits and the slot that an id, or a ticket, names.
local function wants(who)
  return string.match(who, '^s(%d+)/(%d*)', 34)
end

local function no(rank, free)
  local taken, first = {}, redis.call('ZRANGE', hold, 0, 0, 'WITHSCORES')
  for _, each in ipairs(redis.call('ZRANGE', hold, 0, -1)) do
    local _, slot = wants(each)
    if slot ~= '' then taken[#taken + 1] = slot end
  end
  taken = table.concat(taken, ' ')
  if free or not first[1] then return {0, -2, '', rank, order, taken} end
  return {0, first[2] - now, first[1], rank, order, taken}
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
local waiter, woken = ARGV[10] ~= '' and ARGV[10] or id, 0

-- Whether one more may stand beside the holders, and beside whom we woke.
local function admits(who)
  local permits, slot = wants(who)
  if redis.call('ZCARD', hold) + woken >= tonumber(permits) then return false end
  if slot ~= '' then
    for _, each in ipairs(redis.call('ZRANGE', hold, 0, -1)) do
      local _, other = wants(each)
      if other == slot then return false end
    end
  end
  return true
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
  local number, fresh, ends, fences = string.match(ticket, '(%S+) (%S+) (%S+) (%S+)')
  if tonumber(fresh) <= now or redis.call('ZSCORE', hold, head) then return 'gone' end
  if not admits(head) then return 'waits' end
  if serving == '1' or fences == '0' then
    local heard = tell(head, number, 0, left)
    return not heard and 'silent' or heard > 0 and 'woken' or 'gone'
  end
  local top = math.max(f + 1, us) + (fences - 1)
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
      woken, at = woken + 1, at + 1
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
  if not enter then enqueue() end
  if verb == 'wait' then enter = serve(waiter) end
  if not enter or verb == 'wait' then
    local rank = number and redis.call('ZRANK', queue, waiter) or -1
    return no(rank, enter)
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
