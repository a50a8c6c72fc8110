"""Routes for those who see and steer the cluster: its state, layout, drains and priorities."""
