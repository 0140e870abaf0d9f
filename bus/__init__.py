"""Everything that knows NATS. Nobody else imports `nats`; the rest of the mesh speaks in schemas, not bytes."""
