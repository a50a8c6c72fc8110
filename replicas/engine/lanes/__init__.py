"""What a lane is: a scheduler and a runner over the instance's weights and KV memory; and the lane of one alone."""
