-- holders: the text that is shared by the kinds whose name several ids can hold. It is joined in the same way as
-- queue.lua. The hold of such a name is a sorted set: the ids of the holders, by the end of their leases in Unix ms.

--@ part holders
-- Before this part, the kind's own text defines `letters`: a pattern of the 34th character of its ids.
--@ join clock
local now, shared, order, woken, last, unserved = math.floor(us / 1000), true, 0, 0, nil, 0
local first = redis.pcall('ZRANGE', hold, 0, 0)
if first.err then
  --@ join undo_of_another_kind
  return first
end
first = first[1]
if first then
  if not string.match(first, letters, 34) then
    --@ join undo_of_another_kind
    return redis.error_reply('WRONGTYPE another kind')
  end
  redis.call('ZREMRANGEBYSCORE', hold, '-inf', now)
end
local f, held = tonumber(redis.call('GET', fence)) or 0, redis.call('ZSCORE', hold, id)
--@ join raise

if held and verb == 'extend' then
  if lease > 0 and tonumber(held) < now + lease then
    redis.pcall('ZADD', hold, string.format('%.0f', now + lease), id)
    if redis.call('PTTL', hold) < lease then redis.call('PEXPIRE', hold, lease) end
  end
  return {1, f}
end

-- No waiter, no rest and no tombstone: the most frequent release.
local quick = held and verb == 'release' and ARGV[6] .. ARGV[7] .. ARGV[11] == '00'
if quick and redis.call('EXISTS', queue) == 0 then return {redis.call('ZREM', hold, id), f} end

if verb ~= 'release' and verb ~= 'extend' and redis.call('EXISTS', undone) == 1 then return {-1} end
local waiter = ARGV[10] ~= '' and ARGV[10] or id
local adopted = verb == 'adopt' and not held and redis.call('ZSCORE', hold, waiter)
local enter = adopted or held and (verb == 'acquire' or verb == 'adopt')

--@ part no_tickets
-- Before this part, the kind's own text defines admits(id), and passes, as of queue.lua. An attempt enters after the tickets that can
-- enter, but not if it heals.
if verb == 'acquire' and not enter and admits(id) then
  enter = string.sub(ARGV[8], 1, 1) == '0' or redis.call('EXISTS', queue) == 0
end

--@ part places
-- Before this part, the kind's own text defines no(rank, turn).
if verb == 'extend' or verb == 'adopt' then return no(-1) end
if verb == 'peek' then
  --@ join goes_first
  return no(admits(id) and -1 or 0, admits(id))
end
--@ join ticket

local function grant(who, ends)
  redis.pcall('ZADD', hold, string.format('%.0f', ends), who)
  if redis.call('PTTL', hold) < ends - now then redis.call('PEXPIRE', hold, string.format('%.0f', ends - now)) end
  return true
end

local function leave(who, rest)
  redis.call('ZREM', hold, who)
  if rest then grant('~' .. string.sub(who, 2), now + rest) end
end

local function rests_for()
  local soonest = redis.call('ZRANGE', hold, 0, 0, 'WITHSCORES')
  return string.sub(soonest[1] or '', 1, 1) == '~' and string.format('%.0f', soonest[2] - now)
end
--@ join serve

--@ part enter
if not held and not adopted and redis.call('ZREM', queue, waiter) == 1 then
  redis.call('HDEL', tickets, string.sub(waiter, 1, 32))
end
if f == 0 or not held then
  --@ join fence
end
local ends = math.max(now + lease, tonumber(held or adopted or 0))
redis.call('ZADD', hold, string.format('%.0f', ends), id)
if adopted then redis.call('ZREM', hold, waiter) end
if redis.call('PTTL', hold) < lease then redis.call('PEXPIRE', hold, lease) end
return {1, f}
