-- queue: the text that all kinds of lock share. It is not a script: `scripts/__init__.py` copies each part of it to the
-- line of a kind's own text that joins it.
--
-- KEYS  1 hold     a mutex: a string; other kinds: a sorted set (holders.lua). It expires when the last lease ends.
--       2 fence    string: F, the highest fencing token that this node knows of for the name
--       3 queue    sorted set: the ids of the waiters, by order key
--       4 tickets  hash: random part of a waiter's id -> number, fresh until, ends (Unix ms), span, tasks; a ! follows
--                  once the waiter was notified, of kinds that several ids can hold
--       5 undone   string: the tombstone of this id. While it exists, the id is not granted.
-- ARGV  1 verb     acquire, extend, release; wait: renew a ticket and reply whether it can enter; adopt: take over the
--                  hold of another id; break: remove the holds; peek: reply whether an acquire would enter
--       2 id       of the attempt, and of the hold once it is granted; break: '' removes the holds of asynclock, any
--                  other id also those of other programs, and a mutex a key of any type
--       3 lease    ms; 0 in an extend: only read, and raise F
--       4 fence    acquire: P, the client's clock in us; else the token T, or 0 before there is one
--       5 memory   ms that F outlives its last write
--       6 rest     release: ms that the name stays taken (min_hold); after a run of `once` that returned, a d follows
--                  the number, or df: then a free name gets the mark, too
--       7 tomb     release: 1 leaves a tombstone, because the acquire can still arrive
--       8 serve    for the next waiter: 0 nothing, 1 it is woken, 2 it becomes the holder; then f: a mutex acquire
--                  enters only as the first of the queue. An acquire with 0 belongs to a hold that a majority of the
--                  nodes has, and this server lacks: it does not wait behind the queue, with f or without
--       9 span     the number of fences to take; 0, of a ticket: the waiter is woken, and never becomes the holder; an
--                  acquire with such a ticket takes one
--      10 waiter   the id of the ticket, '' the same id; adopt: the id of the hold; break: who breaks it, '' unknown
--      11 ticket   '': none; else '<number> <fresh> <order> <tasks>': how often it was sent, the ms for which it can be
--                  served, its order key in us (0: the server takes its own clock), the tasks that wait with it
-- returns {1, F}                          yes; the fences of a span end at F. A mutex: {1, F, 1} if other clients wait
--         {0, pttl, holder, rank, order}  no: another id holds it, for pttl ms (-1: no end); pttl -2: nobody holds it
--         {-1}                            no: this id was undone
-- To a peek: {0, -2, '', -1, 0} an acquire would enter; else {0, pttl, holder, 0, 0}.
--
-- No shebang: at its memory limit a server refuses a whole script with a shebang, and releases and extends must still
-- work there. After the first write of a script the server refuses no more commands. So a script writes the fence first
-- and the hold last, and an acquire that fails in between leaves nothing that blocks the name.

--@ part names
local hold, fence, queue, tickets, undone = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local verb, id, lease, span = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[9])

--@ part raise
-- An extend and a release carry the token. pcall: they must succeed at the memory limit.
if (verb == 'extend' or verb == 'release') and f < tonumber(ARGV[4]) then
  if not redis.pcall('SET', fence, ARGV[4], 'PX', ARGV[5]).err then f = tonumber(ARGV[4]) end
elseif verb == 'extend' and ARGV[4] ~= '0' then
  redis.call('PEXPIRE', fence, ARGV[5])
end

--@ part clock
local time = redis.call('TIME')
local us = time[1] * 1000000 + time[2]

--@ part fence
f = math.max(f + 1, math.min(math.max(tonumber(ARGV[4]), us - 10000000), us + 10000000)) + math.max(span - 1, 0)
redis.call('SET', fence, string.format('%.0f', f), 'PX', ARGV[5])

--@ part undo_of_another_kind
-- The name is in use as another kind. The acquire that an undo is for may arrive after that use has ended.
if verb == 'release' and ARGV[7] == '1' then
  redis.call('ZREM', queue, id)  -- first a write that no server refuses: then the next one works at the memory limit
  redis.call('SET', undone, '', 'PX', lease)
end

--@ part goes_first
-- For a peek of an attempt that enters after the tickets before it, after the kind's own text has defined what the part
-- `ticket` needs. Each fresh ticket counts as served, where it can enter.
local before = redis.call('ZRANGE', queue, 0, 63)
if before[64] then return no(0) end
for _, each in ipairs(before) do
  local fresh = string.match(redis.call('HGET', tickets, string.sub(each, 1, 32)) or '0 0', '%S+ (%S+)')
  if tonumber(fresh) > now then
    if admits(each) then
      woken, last = woken + 1, each
    elseif not passes or not passes(each) then
      return no(0)
    end
  end
end

--@ part ticket
-- Before this part, the kind's own text defines:
--   shared           whether several ids can hold the name
--   passes(blocked)  nil; or whether this call serves those behind a ticket that cannot enter, and may enter itself
--   held, f          whether this id holds it; F
--   holder, marked   a mutex: the holder, and whether the hold has the mark of a waiter
--   us, now          the server's clock in us and in ms
--   waiter           the id of the ticket of this call
--   order            0; the ticket's order key once it is stored
--   woken, last      0 and nil; how many waiters this call has woken, and the id of the last one
--   unserved         0; the place in the queue of the first waiter that this call has not woken
--   admits(id)       whether the id can enter beside the holders and the waiters that were woken
--   no(rank, turn)   the reply of a refusal; turn: all tickets before the waiter are served, and it can enter
local serving, number, fresh, asked, tasks = string.sub(ARGV[8], 1, 1), string.match(ARGV[11], '(%S+) (%S+) (%S+) (%S+)')

--@ join notify

local enqueue
if number then
  function enqueue()
    order = tonumber(asked)
    if order == 0 then order = us end
    if number == '1' then order = math.min(math.max(order, us - 10000000), us + 10000000) end
    local ticket = string.format('%s %.0f %.0f %s %s', number, now + fresh, now + lease, span, tasks)
    redis.call('ZADD', queue, string.format('%.0f', order), waiter)
    redis.call('HSET', tickets, string.sub(waiter, 1, 32), ticket)
    if redis.call('PTTL', queue) < lease then
      redis.call('PEXPIRE', queue, lease)
      redis.call('PEXPIRE', tickets, lease)
    end
    if not shared and holder and not marked and string.match(holder, '^%x+()|') == 33 then
      redis.call('SET', hold, '+' .. holder, 'KEEPTTL')  -- this holder serves the queue if it knows of waiters
      notify(holder, '0', '0', '-1')
    end
  end
end

if verb == 'acquire' and not admits(id) then
  if not number then return no(-1) end
  enqueue()
  return no(redis.call('ZRANK', queue, waiter))
end

--@ part serve
-- Before this part, the kind's own text defines:
--   grant(id, ends)  makes the id a holder; false if the server refuses that
--   leave(id, rest)  ends its hold; with a rest in ms its place stays taken for so long
--   rests_for()      the ms for which the name rests, of several places the first; nil or false: it does not
local function drop(who)
  if redis.call('ZREM', queue, who) == 1 then redis.call('HDEL', tickets, string.sub(who, 1, 32)) end
end

-- Notifies the first waiter that was not woken now of when the name will be free. A client that polls asks by itself.
local function notify_of_rest(left)
  local index = unserved
  for _ = 1, 512 do
    local who = redis.call('ZRANGE', queue, index, index)[1]
    if not who then return end
    local its, fresh = string.match(redis.call('HGET', tickets, string.sub(who, 1, 32)) or '0 0', '(%S+) (%S+)')
    if tonumber(fresh) > now and string.sub(who, 33, 33) == '!' then
      index = index + 1
    elseif tonumber(fresh) > now and notify(who, its, '0', left) ~= 0 then
      return
    else
      drop(who)
    end
  end
end

local reply, turn, may_rest
if verb == 'release' then
  reply = held and {1, f} or no(-1)
  local place = redis.call('ZRANK', queue, id)
  -- It may leave only rests, or the first waiter leaves, or a waiter that has entered sends the release of an unused id.
  may_rest = ARGV[6] == '0' and (held or place == 0 or serving ~= '0' and not place)
  drop(id)  -- first a write that no server refuses: then the next writes work at the memory limit
  if ARGV[7] == '1' then redis.call('SET', undone, '', 'PX', lease) end
  local rest = ARGV[6] ~= '0' and string.match(ARGV[6], '%d+')
  if held then leave(id, rest) end
  if held and rest then
    serving = '0'
    notify_of_rest(rest)
  end
elseif verb == 'break' then
  for _, each in ipairs(shared and redis.call('ZRANGE', hold, 0, -1) or {holder or nil}) do
    local made = string.match(string.gsub(each, '^~', '0'), '^%x+()[|!]') == 33
    local rests = each == 'asynclock~resting' or each == 'asynclock~done'
    if made or rests or id ~= '' then
      reply = {1, f}
      leave(each)
      if string.match(each, '^%x+()|') == 33 then
        if ARGV[10] ~= '' then notify(each, '0', '0', '-2', 'asynclock~by~' .. ARGV[10]) end
        notify(each, '0', '0', '-2')
      end
    end
  end
  if not reply then return no(-1) end
elseif number then
  enqueue()
end

-- Serve the waiters from the head of the queue, up to the waiter of this call, as long as they can enter.
local polled, served, place = false, 0, 0
for _ = 1, serving ~= '0' and (shared or not holder) and 512 or 0 do
  local head = redis.call('ZRANGE', queue, place, place)[1]
  if not head or not reply and head == waiter then
    turn = not reply and admits(id)  -- a break has no id
    break
  end
  local ticket = redis.call('HGET', tickets, string.sub(head, 1, 32)) or '0 0 0 0'
  local its, fresh, ends, fences = string.match(ticket, '(%S+) (%S+) (%S+) (%S+)')
  local blocked, received, left = false, 0, shared and served >= 56 and '-3' or '-1'  -- -3: this waiter continues the batch
  local wakes = serving == '1' or fences == '0'
  local comes = wakes and string.sub(ticket, -1) == '!'  -- it sends its ticket again, by which it gets the next notice
  if tonumber(fresh) > now and not (shared and redis.call('ZSCORE', hold, head)) then
    if not admits(head) then
      if not passes or not passes(head) then break end
      place, blocked = place + 1, true
    elseif comes then
      received = 1
    elseif wakes then
      received = notify(head, its, '0', left)
    else
      local top = math.max(f + 1, us) + (fences - 1)
      local token = string.format('%.0f', top)
      if redis.pcall('SET', fence, token, 'PX', ARGV[5]).err then break end
      f = top
      if not grant(head, ends) then break end
      received = notify(head, its, token, left)
      if string.sub(head, 33, 33) == '!' then received, polled = 1, true end  -- its client polls, and finds the hold
      if not received or received == 0 then leave(head) end  -- its client does not know of the hold
    end
  end
  if not received then break end
  if wakes and received > 0 then
    if unserved == place then unserved = place + 1 end
    woken, last, place = woken + 1, head, place + 1
    if shared and not comes then redis.pcall('HSET', tickets, string.sub(head, 1, 32), ticket .. ' !') end
  elseif not blocked then
    drop(head)  -- it has entered, or its ticket is stale, or its client does not listen
  end
  if received > 0 and not shared then break end
  if received > 0 and not comes then served = served + 1 end
  if served == 64 then break end
end
if polled then  -- the release of such a holder may notify nobody: the next waiter asks, and sees that
  local head = redis.call('ZRANGE', queue, unserved, unserved)[1]
  local ticket = head and redis.call('HGET', tickets, string.sub(head, 1, 32))
  if ticket then notify(head, string.match(ticket, '%S+'), '0', '-1') end
end
local left = may_rest and rests_for()  -- one waiter alone is notified of the end of a rest: now the next one is
if left then notify_of_rest(left) end

if number and held and verb == 'release' then enqueue() end  -- its ticket, whose place the hold took
if reply then return reply end
if verb == 'wait' or not turn then return no(number and redis.call('ZRANK', queue, waiter) or -1, turn) end

--@ part notify
-- The number of clients that received the notice; false: no permission to publish. All arguments are strings, because
-- `..` rounds numbers.
local function notify(to, its, token, left, by)
  local notice = string.sub(to, 1, 32) .. ' ' .. its .. ' ' .. token .. ' ' .. left .. ' ' .. hold .. (by or '')
  local received = redis.pcall('PUBLISH', 'asynclock~' .. string.sub(to, 1, 12), notice)
  return type(received) == 'number' and received
end

--@ part notify_in_shard
-- The same in a cluster. `shard` is a hash tag in a slot of this server: clients subscribe to a channel there. If the
-- client is not connected here, the notice goes to the clients of all servers, because slots may have moved. SPUBLISH is
-- not sent then: a replica would pass on a grant that is undone here, to a client that was connected to it as a master.
local function notify(to, its, token, left, by)
  local notice = string.sub(to, 1, 32) .. ' ' .. its .. ' ' .. token .. ' ' .. left .. ' ' .. hold .. (by or '')
  local channel = 'asynclock~' .. string.sub(to, 1, 12)
  local own = channel .. '{' .. shard .. '}'
  local received = (redis.pcall('PUBSUB', 'SHARDNUMSUB', own)[2] or 0) > 0 and redis.pcall('SPUBLISH', own, notice)
  if type(received) ~= 'number' or received == 0 then received = redis.pcall('PUBLISH', channel, notice) end
  return type(received) == 'number' and received
end
