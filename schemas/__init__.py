"""Every message and record that crosses the bus or the disk, as msgspec structs. No I/O, no clock, no asyncio."""
