"""What an instance does, in virtual time: schedulers, lanes, switches, and the port that the controller asks."""
