// redis-semaphore's Mutex in the role of contender.py: acquires and releases one hot name until the next line.
import { createInterface } from 'node:readline'
import Redis from 'ioredis'
import { Mutex } from 'redis-semaphore'

const [tasks, path] = process.argv.slice(2)
const words = createInterface({ input: process.stdin })[Symbol.asyncIterator]()
const now = () => Number(process.hrtime.bigint()) / 1e9
const sayAndWait = async (what) => {
  console.log(what)
  await words.next()
}

const redis = new Redis({ path, lazyConnect: true })
const waits = []
let stopped = false
let ended = 0

async function work() {
  while (!stopped) {
    const mutex = new Mutex(redis, 'hot', { lockTimeout: 30000 })
    const asked = now()
    await mutex.acquire()
    waits.push(now() - asked)
    await mutex.release()
  }
  ended++
}

await redis.connect()
await sayAndWait('ready')
const working = Array.from({ length: Number(tasks) }, work)
await sayAndWait('working')
stopped = true
await Promise.race([Promise.all(working), new Promise((late) => setTimeout(late, 5000))])
process.stdout.write(JSON.stringify({ waits, took: [], gave: [], late: working.length - ended }) + '\n', () => process.exit(0))
