"""The run's own policies - admission, bus index, overdue rule - on a simulated clock."""
