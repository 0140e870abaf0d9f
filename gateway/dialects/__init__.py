"""What clients speak, turned into one inner request and back into bytes. Pure: no await, clock, randomness or I/O."""
