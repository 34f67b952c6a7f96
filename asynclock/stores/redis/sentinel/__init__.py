"""The master of a Redis Sentinel deployment: found through its sentinels, and left when they switch to another one."""
