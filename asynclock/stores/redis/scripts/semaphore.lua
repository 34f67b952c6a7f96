-- semaphore: up to a number of holders per name. Each acquire brings that number, its permits.
--
-- KEYS, ARGV  as in queue.lua; from the 34th character on, an id has "s<permits>/<slot>."; 8: no f
--             Over N nodes each hold has a slot, a number below its permits, which a majority of the nodes grants to
--             no other hold. A hold on a single node has no slot, and a ticket has none.
-- returns     as in queue.lua, but {0, pttl, holder, rank, order, taken}: the holder is the one whose lease ends first;
--             taken is the slots in use, separated by spaces
local letters = '^s'
--@ join names
--@ join holders

local function wants(who)
  return string.match(who, '^s(%d+)/(%d*)', 34)
end

local least = math.huge  -- the fewest permits of the waiters that were woken: who enters beside them does not keep them out
local function admits(who)
  local permits, slot = wants(who)
  if last then least = math.min(least, tonumber((wants(last)))) end
  if redis.call('ZCARD', hold) + woken >= math.min(tonumber(permits or 0), least) then return false end
  if slot ~= '' then
    for _, each in ipairs(redis.call('ZRANGE', hold, 0, -1)) do
      local _, other = wants(each)
      if other == slot then return false end
    end
  end
  return true
end

local function passes(blocked)
  return tonumber(wants(blocked) or 0) < tonumber(wants(id) or 0)
end
--@ join no_tickets

if not enter then
  local function no(rank, turn)
    local taken, held = {}, redis.call('ZRANGE', hold, 0, 0, 'WITHSCORES')
    for _, each in ipairs(redis.call('ZRANGE', hold, 0, -1)) do
      local _, slot = wants(each)
      if slot ~= '' then taken[#taken + 1] = slot end
    end
    taken = table.concat(taken, ' ')
    if turn or not held[1] then return {0, -2, '', rank, order, taken} end
    return {0, held[2] - now, held[1], rank, order, taken}
  end
  --@ join places
end
--@ join enter
