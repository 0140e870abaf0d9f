"""The worker: intake, slots, engines, model lifecycle. Never imports `gateway`."""
