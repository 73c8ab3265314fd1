"""The step loop and what runs its plans: a torch executor and a simulated one behind one interface."""
