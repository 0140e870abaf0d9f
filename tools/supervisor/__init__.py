"""A whole mesh on one machine as real processes: started in order, watched, restarted, ended in order."""
