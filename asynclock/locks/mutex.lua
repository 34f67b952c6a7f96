-- mutex: one holder per name; its hold is a lease with a fencing token.
--
-- KEYS  1 hold    string: the holder's id; PX: what is left of its lease
--       2 fence   string: F, the highest token this node knows of for the name
--       3 undone  string: the tombstone of this id; where it is, the id is never granted (again)
-- ARGV  1 verb    acquire, extend or release
--       2 id      of the attempt, and of the hold once granted
--       3 lease   ms; 0 in an extend: only look, and raise F
--       4 fence   acquire: P, the client's clock in us; else the token T, 0 where there is none yet
--       5 memory  ms that F outlives its last write
--       6 rest    release: ms that the name stays taken (min_hold)
--       7 tomb    release: 1 leaves the tombstone, for an acquire that may still be on its way
-- returns {1, F}             yes
--         {0, pttl, holder}  no: somebody else holds it, for pttl ms (-1: no end); pttl -2: nobody
--         {-1}               no: this id was undone
--
-- No shebang: under OOM a script with one is refused whole, and release and extend must go on.
local hold, fence, undone = KEYS[1], KEYS[2], KEYS[3]
local verb, id, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local found = redis.call('MGET', hold, fence, undone)
local holder, f = found[1], tonumber(found[2]) or 0

if verb == 'acquire' then
  if found[3] then return {-1} end
  if holder and holder ~= id then return {0, redis.call('PTTL', hold), holder} end
  if f == 0 or not holder then
    local time = redis.call('TIME')
    local now = time[1] * 1000000 + time[2]
    f = math.max(f + 1, math.min(math.max(tonumber(ARGV[4]), now - 10000000), now + 10000000))
    redis.call('SET', fence, string.format('%.0f', f), 'PX', ARGV[5])
  end
  -- Fence first, hold last: whatever fails between leaves nothing that blocks.
  if not holder then
    if not redis.call('SET', hold, id, 'NX', 'PX', lease) then redis.call('GET', hold) end  -- no string: WRONGTYPE
  elseif redis.call('PTTL', hold) < lease then
    redis.call('PEXPIRE', hold, lease)
  end
  return {1, f}
end

-- pcall below: OOM must not stop a release or an extend.
if f < tonumber(ARGV[4]) then
  if not redis.pcall('SET', fence, ARGV[4], 'PX', ARGV[5]).err then f = tonumber(ARGV[4]) end
elseif verb == 'extend' and ARGV[4] ~= '0' then
  redis.call('PEXPIRE', fence, ARGV[5])
end
if verb == 'release' and ARGV[7] == '1' then redis.pcall('SET', undone, '', 'PX', lease) end
if holder ~= id then return {0, redis.call('PTTL', hold), holder or ''} end
if verb == 'extend' then
  if lease > 0 and redis.call('PTTL', hold) < lease then redis.call('PEXPIRE', hold, lease) end
elseif ARGV[6] == '0' then
  redis.call('DEL', hold)
elseif redis.pcall('SET', hold, 'asynclock~resting', 'PX', ARGV[6]).err then
  redis.call('PEXPIRE', hold, ARGV[6])  -- OOM: the name rests under its old id
end
return {1, f}
