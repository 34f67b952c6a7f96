-- mutex: one holder per name; its hold is a lease with a fencing token. Who waits stands in a queue, and is served.
--
-- KEYS  1 hold     string: the holder's id, after a '+' where somebody waits for it; PX: what is left of its lease
--       2 fence    string: F, the highest token this node knows of for the name
--       3 queue    sorted set: who waits, by order key
--       4 tickets  hash: random part of a waiter's id -> number, fresh until, ends (Unix ms), span
--       5 undone   string: the tombstone of this id; where it is, the id is never granted (again)
-- ARGV  1 verb     acquire, extend, release; wait: renew a ticket, and look; adopt: take over the hold of another id;
--                  break: take it from whoever has it
--       2 id       of the attempt, and of the hold once granted
--       3 lease    ms; 0 in an extend: only look, and raise F
--       4 fence    acquire: P, the client's clock in us; else the token T, 0 where there is none yet
--       5 memory   ms that F outlives its last write
--       6 rest     release: ms that the name stays taken (min_hold); with a d behind the number, since a run of `once`
--                  has returned
--       7 tomb     release: 1 leaves the tombstone, for an acquire that may still be on its way
--       8 serve    what becomes of the next in the queue: 0 nothing, 1 is woken, 2 is made the holder; after it an f,
--                  where an acquire enters only as the first of the queue
--       9 span     acquire: so many fences are wanted; 0, of a ticket: it is woken, never made the holder
--      10 waiter   whose ticket it is; '' the id's own; adopt: whose hold
--      11 ticket   '' leaves none; else '<number> <fresh> <order>': number of this sending, ms for which it may be served,
--                  its order key in us (0: this server's clock says)
-- returns {1, F}                          yes; with a span its fences end at F; acquire: {1, F, 1} where others wait
--         {0, pttl, holder, rank, order}  no: somebody else holds it, for pttl ms (-1: no end); pttl -2: nobody
--         {-1}                            no: this id was undone
--
-- No shebang: under OOM a script with one is refused whole, and release and extend must go on.
local hold, fence, queue, tickets, undone = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local verb, id, lease, span = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[9])
local found = redis.call('MGET', hold, fence, undone)
local holder, f, marked = found[1], tonumber(found[2]) or 0, false
if holder and string.byte(holder) == 43 then holder, marked = string.sub(holder, 2), true end

if (verb == 'extend' or verb == 'release') and f < tonumber(ARGV[4]) then
  -- pcall here and below: OOM must not stop an extend or a release.
  if not redis.pcall('SET', fence, ARGV[4], 'PX', ARGV[5]).err then f = tonumber(ARGV[4]) end
elseif verb == 'extend' and ARGV[4] ~= '0' then
  redis.call('PEXPIRE', fence, ARGV[5])
end

if verb == 'extend' then
  if holder ~= id then return {0, redis.call('PTTL', hold), holder or '', -1, 0} end
  if lease > 0 and redis.call('PTTL', hold) < lease then redis.call('PEXPIRE', hold, lease) end
  return {1, f}
end

-- Nobody waits and nothing stays: what most releases find.
local quick = verb == 'release' and ARGV[6] .. ARGV[7] .. ARGV[11] == '00' and not marked
if quick and holder == id and redis.call('EXISTS', queue) == 0 then return {redis.call('DEL', hold), f} end

if verb ~= 'release' and found[3] then return {-1} end
local waiter, waited, enter = ARGV[10] ~= '' and ARGV[10] or id, false, verb == 'acquire' and holder == id
if verb == 'acquire' and not holder then
  local barges = #ARGV[8] == 1
  waited = barges and ARGV[10] ~= '' or redis.call('EXISTS', queue) == 1  -- a ticket of its own is taken off unseen
  enter = barges or not waited
elseif verb == 'adopt' then
  enter = holder == id or holder == waiter
  if not enter then return {0, redis.call('PTTL', hold), holder or '', -1, 0} end
end
local adopted = verb == 'adopt' and holder ~= id

if not enter then
  if not holder then redis.call('GET', hold) end  -- no string: WRONGTYPE
  local time = redis.call('TIME')
  local us, order = time[1] * 1000000 + time[2], 0
  local now = math.floor(us / 1000)
  local serving = string.sub(ARGV[8], 1, 1)
  local number, fresh, asked = string.match(ARGV[11], '(%S+) (%S+) (%S+)')

  -- So many heard it; false: no permission to publish. All words are text: joined, a token would lose its last digits.
  local function tell(to, its, token, left)
    local told = string.sub(to, 1, 32) .. ' ' .. its .. ' ' .. token .. ' ' .. left .. ' ' .. hold
    local heard = redis.pcall('PUBLISH', 'asynclock~' .. string.sub(to, 1, 12), told)
    return type(heard) == 'number' and heard
  end

  local function drop(who)
    if redis.call('ZREM', queue, who) == 1 then redis.call('HDEL', tickets, string.sub(who, 1, 32)) end
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
    if holder and not marked and string.match(holder, '^%x+()|') == 33 then  -- ours: it will serve, if it knows
      redis.call('SET', hold, '+' .. holder, 'KEEPTTL')
      tell(holder, '0', '0', '-1')
    end
  end

  local reply
  if verb == 'release' then
    if ARGV[7] == '1' then redis.pcall('SET', undone, '', 'PX', lease) end
    reply = {1, f}
    if holder ~= id then reply = {0, redis.call('PTTL', hold), holder or '', -1, 0} end
    drop(id)  -- and no write after one is refused under OOM
    if holder == id then
      if ARGV[6] == '0' then
        redis.call('DEL', hold)
        holder = false
      else
        local rest, done = string.match(ARGV[6], '(%d+)(d?)')
        holder = done == 'd' and 'asynclock~done' or 'asynclock~resting'
        redis.call('SET', hold, holder, 'PX', rest)
        local head = redis.call('ZRANGE', queue, 0, 0)[1]
        local ticket = head and redis.call('HGET', tickets, string.sub(head, 1, 32))
        if ticket then tell(head, string.match(ticket, '%S+'), '0', rest) end
      end
    end
  elseif verb == 'break' then
    if not holder then return {0, -2, '', -1, 0} end
    redis.call('DEL', hold)
    if string.match(holder, '^%x+()|') == 33 then tell(holder, '0', '0', '-2') end
    reply, holder = {1, f}, false
  else
    enqueue()
  end

  -- Serve: the first who is neither stale nor deaf; up to who asks, for then it is its turn.
  local turn = false
  for _ = 1, not holder and serving ~= '0' and 64 or 0 do
    local head = redis.call('ZRANGE', queue, 0, 0)[1]
    turn = not head or not reply and head == waiter
    if turn then break end
    local ticket = redis.call('HGET', tickets, string.sub(head, 1, 32))
    local its, fresh, ends, wants = string.match(ticket or '', '(%S+) (%S+) (%S+) (%S+)')
    local lives, heard = fresh and tonumber(fresh) > now, 0
    if lives and (serving == '1' or wants == '0') then
      heard = tell(head, its, '0', '-1')
    elseif lives then
      f = math.max(f + 1, us) + (wants - 1)
      local top = string.format('%.0f', f)
      if redis.pcall('SET', fence, top, 'PX', ARGV[5]).err then break end
      if redis.pcall('SET', hold, '+' .. head, 'PX', ends - now).err then break end
      heard = tell(head, its, top, '-1')
      if heard and heard > 0 then
        drop(head)
        holder, marked = head, true
      else
        redis.call('DEL', hold)  -- what nobody was told is taken back
      end
    end
    if heard ~= 0 then break end  -- told (or may not be)
    drop(head)
  end
  if verb == 'release' then enqueue() end
  if reply then return reply end

  enter = turn and verb == 'acquire'
  if not enter then
    local rank = number and redis.call('ZRANK', queue, waiter) or -1
    return {0, redis.call('PTTL', hold), holder or '', rank, order}
  end
end

-- Fence first, hold last: whatever fails between leaves nothing that blocks.
if f == 0 or not holder or adopted then
  local time = redis.call('TIME')
  local us = time[1] * 1000000 + time[2]
  f = math.max(f + 1, math.min(math.max(tonumber(ARGV[4]), us - 10000000), us + 10000000)) + (span - 1)
  redis.call('SET', fence, string.format('%.0f', f), 'PX', ARGV[5])
end
if adopted then
  redis.call('SET', hold, (marked and '+' or '') .. id, 'PX', math.max(lease, redis.call('PTTL', hold)))
elseif holder then
  if redis.call('PTTL', hold) < lease then redis.call('PEXPIRE', hold, lease) end
else
  if waited then
    redis.call('ZREM', queue, waiter)
    redis.call('HDEL', tickets, string.sub(waiter, 1, 32))
    marked = redis.call('EXISTS', queue) == 1
    if marked then id = '+' .. id end
  end
  if not redis.call('SET', hold, id, 'NX', 'PX', lease) then redis.call('GET', hold) end  -- no string: WRONGTYPE
end
return {1, f, marked and verb == 'acquire' and 1 or nil}
