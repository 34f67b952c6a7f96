-- read-write: many readers or one writer per name. A writer in the queue holds back the readers that come after it.
--
-- KEYS, ARGV  as in queue.lua; the 34th character of an id is r or w
-- returns     as in queue.lua; the holder of {0, pttl, holder, ...} is the one whose lease ends last
local letters, passes = '^[rw]', nil
--@ join names
--@ join holders

-- A writer is alone, so one holder shows the mode of all holders, and the last woken waiter that of all woken waiters.
local function admits(who)
  local found, mode = redis.call('ZRANGE', hold, 0, 0)[1], string.sub(who, 34, 34)
  local reads = mode == 'r' and (not found or string.sub(found, 34, 34) == 'r')
  return (reads or not found) and (not last or mode .. string.sub(last, 34, 34) == 'rr')
end

--@ join no_tickets

if not enter then
  local function no(rank, turn)
    local held = redis.call('ZRANGE', hold, -1, -1, 'WITHSCORES')
    if turn or not held[1] then return {0, -2, '', rank, order} end
    return {0, held[2] - now, held[1], rank, order}
  end
  --@ join places
end
--@ join enter
