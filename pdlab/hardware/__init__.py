"""What machine is this, what can it do at best, and how to time it."""
