-- multi: all of several names at once, or none. Above this text, the table `kinds` has the script of each kind as a
-- function of KEYS and ARGV, by the kind's letter. Each name goes through the function of its own kind.
--
-- KEYS     the five keys of queue.lua for each name
-- ARGV     1 to 11 as in queue.lua; 1 verb: acquire, extend, release, peek; 2 id and 10 waiter: without the mode of a kind
--          12...  for each name, the mode in its ids after their 33rd character; f: a mutex in order of arrival
-- returns  {1, F}  yes; the fence of each name is at least F
--          else the reply of the first name that refuses. A ticket is then in the queue of that name alone. The names
--          that were granted are released, and their waiters are served.
local verb, id, waiter, ticket, count = ARGV[1], ARGV[2], ARGV[10], ARGV[11], #KEYS / 5

-- The reply of the nth name. pcall: after an error in one name, the other names are still released.
local function ask(n, what, who, fence, span, note)
  local mode, fair = ARGV[11 + n], ''
  if mode == 'f' then mode, fair = '', 'f' end
  local function named(random)  -- a ticket is for no single slot
    local its = random == waiter and string.gsub(mode, '/%d+', '/') or mode
    return random == '' and '' or string.sub(random, 1, 33) .. its .. string.sub(random, 34)
  end
  local keys = {unpack(KEYS, 5 * n - 4, 5 * n)}
  local words = {what, named(who), ARGV[3], fence, ARGV[5], ARGV[6], ARGV[7], ARGV[8] .. fair, span, named(waiter), note}
  local ran, reply = pcall(kinds[string.sub(mode, 1, 1)], keys, words)
  if not ran then reply = type(reply) == 'table' and reply or {err = reply} end
  if reply[6] then reply[6] = n .. ':' .. reply[6] end
  return reply
end

-- Removes the hold and the ticket of this call there. The release serves the waiters.
local function leave(n)
  ask(n, 'release', id, '0', '1', '')
  if waiter ~= '' then ask(n, 'release', waiter, '0', '1', '') end
end

if verb ~= 'acquire' then
  local least, refused = math.huge, nil
  for n = 1, count do
    local reply = ask(n, verb, id, ARGV[4], ARGV[9], n == 1 and ticket or '')
    if reply[1] == 1 then
      least = math.min(least, reply[2])
    elseif not refused or refused[2] == -2 and refused[4] < 0 then
      refused = reply
    end
  end
  return refused or {1, least}
end

local fences, top = {}, 0
for n = 1, count do
  local reply = ask(n, 'acquire', id, ARGV[4], '0', ticket)  -- its ticket never becomes a holder of this name alone
  if reply[1] ~= 1 then
    for other = 1, count do
      if other ~= n then leave(other) end
    end
    return reply
  end
  fences[n], top = reply[2], math.max(top, reply[2])
end

-- One fence above all fences that any of the names gave before.
for n = 1, count do
  local raised = fences[n] < top and redis.pcall('SET', KEYS[5 * n - 3], string.format('%.0f', top), 'PX', ARGV[5])
  if raised and raised.err then
    for each = 1, count do leave(each) end
    return raised
  end
end
return {1, top}
