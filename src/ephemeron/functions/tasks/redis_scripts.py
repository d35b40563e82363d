"""Lua scripts of `redis_queue`. Each is one atomic step of the server; `KEYS[1]` is the prefix of the queue's keys.

PREFIX ready             sorted set of batches by order
PREFIX leases            sorted set of leased batches by expiry, in ms of the server's clock
PREFIX done              set of complete batches
PREFIX batch/BATCH       tasks, order, left (tasks without a final result), owner, attempt
PREFIX state/BATCH       final:TASK -> status, tries:TASK -> failed tries, nonce:TASK -> of the latest failed try
PREFIX results           list of final results
PREFIX cancelled         set of tasks
PREFIX edge/EDGE         document, inputs, batch, order, tasks, released
PREFIX inputs/EDGE       set of tasks that are done
PREFIX lost              hash of edges with a dead input -> error
PREFIX abandoned         set of edges whose tasks have yet to be recorded as dead
PREFIX live              sorted set of executors by the end of their announcement, in ms
PREFIX count/COUNTER     hash of members -> amount
PREFIX closed            there, if no task will be published any more
PREFIX work              list with an element for each batch that became ready and was not taken: idle executors wait for one. At the end, one
                         for each executor
PREFIX emptied           list with an element after the last batch was completed: clients wait for it
"""

_COMMON = """
local p = KEYS[1]
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function ready(order, batch)
  redis.call('ZADD', p .. 'ready', order, batch)
  redis.call('RPUSH', p .. 'work', '')
end
local function lease(batch, owner, until_ms)
  local key = p .. 'batch/' .. batch
  redis.call('ZREM', p .. 'ready', batch)
  local left = redis.call('ZCARD', p .. 'ready')
  if left == 0 then
    redis.call('DEL', p .. 'work')
  else
    redis.call('LTRIM', p .. 'work', 0, left - 1)
  end
  redis.call('ZADD', p .. 'leases', until_ms, batch)
  local before = redis.call('HGET', key, 'owner') or ''
  redis.call('HSET', key, 'owner', owner)
  local state = redis.call('HGETALL', p .. 'state/' .. batch)
  return {batch, redis.call('HINCRBY', key, 'attempt', 1), redis.call('HGET', key, 'tasks'), state, before}
end
local function publish(batch, tasks, order)
  if redis.call('SISMEMBER', p .. 'done', batch) == 1 or redis.call('EXISTS', p .. 'batch/' .. batch) == 1 then
    return
  end
  redis.call('HSET', p .. 'batch/' .. batch, 'tasks', tasks, 'order', order, 'left', string.match(batch, '%d+$'), 'attempt', 0)
  ready(order, batch)
end
local function fire(edge)
  local key = p .. 'edge/' .. edge
  local e = redis.call('HMGET', key, 'inputs', 'batch', 'order', 'tasks', 'released')
  if not e[1] then
    return
  end
  if redis.call('HEXISTS', p .. 'lost', edge) == 1 then
    if redis.call('HSETNX', key, 'released', 'lost') == 1 then
      redis.call('SADD', p .. 'abandoned', edge)
    end
  elseif redis.call('SCARD', p .. 'inputs/' .. edge) >= tonumber(e[1]) and redis.call('HSETNX', key, 'released', 'yes') == 1 then
    publish(e[2], e[4], e[3])
  end
end
"""

PUBLISH = _COMMON + "publish(ARGV[1], ARGV[2], ARGV[3])"
"""BATCH TASKS ORDER."""

CONNECT = (
    _COMMON
    + """
local others, abandoned = {}, {}
for n = 1, #ARGV, 6 do
  local edge, document, inputs, batch, order, tasks = unpack(ARGV, n, n + 5)
  local key = p .. 'edge/' .. edge
  local there = redis.call('HGET', key, 'document')
  if not there then
    redis.call('HSET', key, 'document', document, 'inputs', inputs, 'batch', batch, 'order', order, 'tasks', tasks)
    fire(edge)
  elseif there ~= document then
    others[#others + 1] = edge
  end
  if redis.call('SISMEMBER', p .. 'abandoned', edge) == 1 then
    abandoned[#abandoned + 1] = edge
  end
end
return {others, abandoned}
"""
)
"""(EDGE DOCUMENT INPUTS BATCH ORDER TASKS)... -> edges that are there already and are others, edges to abandon."""

WAITING_FOR_ONE = (
    _COMMON
    + """
local found = {}
for _, edge in ipairs(ARGV) do
  local e = redis.call('HMGET', p .. 'edge/' .. edge, 'inputs', 'released')
  if e[1] and not e[2] and redis.call('SCARD', p .. 'inputs/' .. edge) + 1 == tonumber(e[1]) then
    found[#found + 1] = edge
  end
end
return {found, redis.call('ZRANGE', p .. 'ready', 0, 0, 'WITHSCORES')[2] or false}
"""
)
"""EDGE... -> those that lack one input, order of the first ready batch."""

TAKE = (
    _COMMON
    + """
local missing, lease_ms, at = tonumber(ARGV[1]), tonumber(ARGV[2]), now()
for _, batch in ipairs(redis.call('ZRANGEBYSCORE', p .. 'leases', '-inf', at, 'LIMIT', 0, 1000)) do
  redis.call('ZREM', p .. 'leases', batch)
  ready(redis.call('HGET', p .. 'batch/' .. batch, 'order') or '0', batch)
end
local there, live = redis.call('ZCARD', p .. 'ready'), redis.call('ZCOUNT', p .. 'live', at, '+inf')
local taken, most = {}, math.max(1, math.ceil(there / math.max(1, live)))
if ARGV[4] == '1' then
  most = math.min(most, there - math.max(0, live - 1))
end
while missing > 0 and #taken < most do
  local batch = redis.call('ZRANGE', p .. 'ready', 0, 0)[1]
  if not batch then
    break
  end
  taken[#taken + 1] = lease(batch, ARGV[3], at + lease_ms)
  missing = missing - tonumber(redis.call('HGET', p .. 'batch/' .. batch, 'left') or '1')
end
local drained = redis.call('EXISTS', p .. 'closed', p .. 'ready', p .. 'leases')
if redis.call('EXISTS', p .. 'closed') == 0 then
  drained = 0
end
return {taken, redis.call('SMEMBERS', p .. 'abandoned'), drained == 1 and 1 or 0}
"""
)
"""N LEASE_MS OWNER BUSY -> leases, edges to abandon, whether the queue is closed and empty."""

RENEW = (
    _COMMON
    + """
local until_ms, alive = now() + tonumber(ARGV[1]), {}
for n = 3, #ARGV, 2 do
  local b = redis.call('HMGET', p .. 'batch/' .. ARGV[n], 'owner', 'attempt')
  local mine = b[1] == ARGV[2] and b[2] == ARGV[n + 1] and redis.call('ZSCORE', p .. 'leases', ARGV[n])
  if mine then
    redis.call('ZADD', p .. 'leases', until_ms, ARGV[n])
  end
  alive[#alive + 1] = mine and 1 or 0
end
return alive
"""
)
"""LEASE_MS OWNER (BATCH ATTEMPT)... -> for each whether it is still this owner's."""

RELEASE = (
    _COMMON
    + """
local key = p .. 'batch/' .. ARGV[2]
local b = redis.call('HMGET', key, 'owner', 'attempt', 'order')
if b[1] == ARGV[1] and b[2] == ARGV[3] and redis.call('ZREM', p .. 'leases', ARGV[2]) == 1 then
  redis.call('HSET', key, 'attempt', 0)
  ready(b[3], ARGV[2])
end
"""
)
"""OWNER BATCH ATTEMPT."""

COMPLETE = (
    _COMMON
    + """
local batch, lease_ms, owner, follows = unpack(ARGV, 1, 4)
local n, recorded, conflicts = 5 + tonumber(follows), {}, {}
local key, state = p .. 'batch/' .. batch, p .. 'state/' .. batch
local function followed()
  local leases, until_ms = {}, now() + tonumber(lease_ms)
  for e = 5, 4 + tonumber(follows) do
    local name = redis.call('HGET', p .. 'edge/' .. ARGV[e], 'batch')
    if name and redis.call('ZSCORE', p .. 'ready', name) then
      leases[#leases + 1] = lease(name, owner, until_ms)
    elseif name and redis.call('ZSCORE', p .. 'leases', name) then
      local b = redis.call('HMGET', p .. 'batch/' .. name, 'owner', 'attempt', 'tasks')
      if b[1] == owner then -- the answer to an earlier request was lost
        leases[#leases + 1] = {name, tonumber(b[2]), b[3], redis.call('HGETALL', p .. 'state/' .. name)}
      end
    end
  end
  return leases
end
if redis.call('EXISTS', key) == 0 then
  return {recorded, conflicts, {}}
end
local left = tonumber(redis.call('HGET', key, 'left') or '1')
while n <= #ARGV do
  local task, status, tries, nonce, data, error, edges = unpack(ARGV, n, n + 6)
  n = n + 7
  local before = tonumber(redis.call('HGET', state, 'tries:' .. task) or '0')
  if redis.call('HEXISTS', state, 'final:' .. task) == 0 then
    if redis.call('HGET', state, 'nonce:' .. task) == nonce then
      recorded[#recorded + 1] = task
    elseif before + 1 ~= tonumber(tries) then
      conflicts[#conflicts + 1] = {task, before}
    elseif status == 'failed' then
      redis.call('HSET', state, 'tries:' .. task, tries, 'nonce:' .. task, nonce)
      recorded[#recorded + 1] = task
    else
      redis.call('HSET', state, 'final:' .. task, status)
      redis.call('RPUSH', p .. 'results', data)
      if status == 'cancelled' then
        redis.call('SADD', p .. 'cancelled', task)
      end
      left = left - 1
      recorded[#recorded + 1] = task
      for e = n, n + tonumber(edges) - 1 do
        if status == 'ok' then
          redis.call('SADD', p .. 'inputs/' .. ARGV[e], task)
        else
          redis.call('HSETNX', p .. 'lost', ARGV[e], error)
        end
        fire(ARGV[e])
      end
    end
  end
  n = n + tonumber(edges)
end
if left > 0 then
  redis.call('HSET', key, 'left', left)
else
  redis.call('UNLINK', key, state)
  redis.call('ZREM', p .. 'ready', batch)
  redis.call('ZREM', p .. 'leases', batch)
  redis.call('SADD', p .. 'done', batch)
end
local leases = followed()
if redis.call('EXISTS', p .. 'ready', p .. 'leases') == 0 then
  redis.call('RPUSH', p .. 'emptied', '')
  redis.call('LTRIM', p .. 'emptied', 0, 0)
end
return {recorded, conflicts, leases}
"""
)
"""BATCH LEASE_MS OWNER N FOLLOWED... (TASK STATUS TRIES NONCE DATA ERROR N EDGE...)... -> recorded tasks, tasks with another number of failed
tries, and leases of the batches of followed edges."""

ABANDON = (
    _COMMON
    + """
publish(ARGV[2], ARGV[3], ARGV[4])
redis.call('ZREM', p .. 'ready', ARGV[2])
return redis.call('EXISTS', p .. 'batch/' .. ARGV[2])
"""
)
"""EDGE BATCH TASKS ORDER: publishes tasks that are not taken yet -> whether they are without results."""

FINISH = (
    _COMMON
    + """
redis.call('SET', p .. 'closed', 'closed')
for _ = 1, redis.call('ZCARD', p .. 'live') do
  redis.call('RPUSH', p .. 'work', '')
end
"""
)
"""Executors that wait for work look, and end."""

DEPTH = (
    _COMMON
    + """
local function tasks(batches)
  local sum = 0
  for _, batch in ipairs(batches) do
    sum = sum + tonumber(string.match(batch, '%d+$'))
  end
  return sum
end
local at = now()
redis.call('ZREMRANGEBYSCORE', p .. 'live', '-inf', at)
local ready = tasks(redis.call('ZRANGE', p .. 'ready', 0, -1))
local expired = tasks(redis.call('ZRANGEBYSCORE', p .. 'leases', '-inf', at))
local leased = tasks(redis.call('ZRANGE', p .. 'leases', 0, -1))
return {ready + expired, leased - expired, redis.call('ZRANGE', p .. 'live', 0, -1), redis.call('EXISTS', p .. 'closed')}
"""
)
"""-> ready tasks, leased tasks, executors, whether closed."""

ANNOUNCE = _COMMON + "redis.call('ZADD', p .. 'live', now() + tonumber(ARGV[2]), ARGV[1])"
"""EXECUTOR LEASE_MS."""

COUNT = (
    _COMMON
    + """
local sums = {}
for n = 4, #ARGV, 2 do
  local key, last, sum = p .. 'count/' .. ARGV[n], tonumber(ARGV[n + 1]), 0
  redis.call('HSETNX', key, ARGV[1], ARGV[2])
  for _, amount in ipairs(redis.call('HVALS', key)) do
    sum = sum + tonumber(amount)
  end
  if last > 0 and sum >= last then
    redis.call('PEXPIRE', key, ARGV[3])
  end
  sums[#sums + 1] = sum
end
return sums
"""
)
"""MEMBER AMOUNT KEPT_MS (COUNTER LAST)... -> sums. A counter whose sum has reached LAST, if that is not 0, expires after so many milliseconds."""
