-- mutex: one holder per name. The hold is a plain string, the same as in other Redlock clients.
--
-- KEYS, ARGV  as in queue.lua; the hold is the holder's id, after a '+' while other clients wait for it
-- returns     as in queue.lua
--@ join names
local found = redis.call('MGET', hold, fence, undone)
local holder, f, marked = found[1], tonumber(found[2]) or 0, false
if holder and string.byte(holder) == 43 then holder, marked = string.sub(holder, 2), true end
local held = holder == id
--@ join raise

if held and verb == 'extend' then
  if lease > 0 and redis.call('PTTL', hold) < lease then redis.call('PEXPIRE', hold, lease) end
  return {1, f}
end

-- No waiter, no rest and no tombstone: the most frequent release.
local quick = held and verb == 'release' and not marked and ARGV[6] .. ARGV[7] .. ARGV[11] == '00'
if quick and redis.call('EXISTS', queue) == 0 then return {redis.call('DEL', hold), f} end

if found[3] and verb ~= 'release' and verb ~= 'extend' then return {-1} end
local waiter, waited = ARGV[10] ~= '' and ARGV[10] or id, false
local adopted = verb == 'adopt' and not held and holder == waiter
local enter = adopted or held and (verb == 'acquire' or verb == 'adopt')
if verb == 'acquire' and not holder then
  local barges = #ARGV[8] == 1 or ARGV[8] == '0f'
  waited = barges and ARGV[10] ~= '' or redis.call('EXISTS', queue) == 1  -- barging: no look at its ticket
  enter = barges or not waited
end

if not enter then
  local order = 0
  local function no(rank)  -- the value of another program may be huge, and ids are shorter than 8 KB
    return {0, redis.call('PTTL', hold), string.sub(holder or '', 1, 8192), rank, order}
  end
  if verb == 'extend' or verb == 'adopt' then return no(-1) end
  if verb == 'break' and id ~= '' and not holder and redis.call('EXISTS', hold) == 1 then holder = '' end  -- any type
  local other = not holder and redis.pcall('GET', hold)
  if other then  -- a key of another type: WRONGTYPE
    --@ join undo_of_another_kind
    return other
  end
  --@ join clock
  local now, shared, passes, woken, last, unserved = math.floor(us / 1000), false, nil, 0, nil, 0
  local done = not held and verb == 'release' and string.find(ARGV[6], 'f') and (holder or 'asynclock~done')
  if done == 'asynclock~done' then held = true end  -- a run of `once` has returned: its release marks a free name
  local function admits() return not holder and not last end
  if verb == 'peek' and #ARGV[8] > 1 then
    --@ join goes_first
  end
  if verb == 'peek' then return no(admits() and -1 or 0) end
  --@ join ticket

  local function grant(who, ends)
    if redis.pcall('SET', hold, '+' .. who, 'PX', ends - now).err then return false end
    holder, marked = who, true
    return true
  end

  local function leave(_, rest)
    if rest then
      local left = done and holder and redis.call('PTTL', hold)
      holder = string.match(ARGV[6], 'd') and 'asynclock~done' or 'asynclock~resting'
      if left and (left < 0 or left > tonumber(rest)) then return end  -- that mark ends later
      redis.call('SET', hold, holder, 'PX', rest)
    else
      holder = false
      redis.call('DEL', hold)
    end
  end

  local function rests_for()
    local left = (holder == 'asynclock~resting' or holder == 'asynclock~done') and redis.call('PTTL', hold) or 0
    return left > 0 and string.format('%.0f', left)
  end
  --@ join serve
end

if f == 0 or not holder or adopted then
  --@ join clock
  --@ join fence
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
  if not redis.call('SET', hold, id, 'NX', 'PX', lease) then redis.call('GET', hold) end  -- of another type: WRONGTYPE
end
return {1, f, marked and verb == 'acquire' and 1 or nil}
