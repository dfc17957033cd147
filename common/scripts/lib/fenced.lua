-- Whether an epoch newer than `epoch` has begun: a batcher of an earlier epoch may write nothing more.
local function fenced(key, epoch)
  local newest = redis.call('GET', key)
  return newest and tonumber(newest) > tonumber(epoch)
end
