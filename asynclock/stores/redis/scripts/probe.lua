-- probe: takes a hold and a ticket of a reserved name and gives both back, with the commands of a mutex. It shows
-- whether this server votes for this user: a script that only reads also succeeds on a replica and without memory.
--
-- KEYS     the five keys of queue.lua
-- ARGV     1 id, 2 lease in ms, 3 a channel to which nobody listens
-- returns  '' or the error of PUBLISH: then the server votes, but its waiters poll
--
-- The first write is one that needs memory, because after a write of a script the server refuses no more commands. The
-- next ones find out whether each key may expire and be deleted. So if a later command is refused, no key stays for
-- longer than the lease.
local hold, fence, queue, tickets, undone = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, lease = ARGV[1], ARGV[2]
redis.call('MGET', hold, fence, undone)
redis.call('GET', hold)
redis.call('EXISTS', queue)
redis.call('TIME')
redis.call('SET', fence, '1', 'PX', lease)
redis.call('SET', undone, '', 'PX', lease)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, lease) end
redis.call('DEL', unpack(KEYS))
redis.call('ZADD', queue, '1', id)
redis.call('PEXPIRE', queue, lease)
redis.call('HSET', tickets, id, '1')
redis.call('PEXPIRE', tickets, lease)
redis.call('ZRANGE', queue, 0, 0)
redis.call('ZRANK', queue, id)
redis.call('HGET', tickets, id)
redis.call('ZREM', queue, id)
redis.call('HDEL', tickets, id)
redis.call('SET', hold, id, 'NX', 'PX', lease)
redis.call('PTTL', hold)
local published = redis.pcall('PUBLISH', ARGV[3], '')
redis.call('DEL', unpack(KEYS))
return type(published) == 'table' and published.err or ''
