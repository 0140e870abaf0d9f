"""`infermesh doctor`: what this machine is, what it should reach with a model, and what it does reach."""
