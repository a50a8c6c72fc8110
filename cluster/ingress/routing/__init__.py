"""Where requests go: the routing table, the links to instances, and the choice among them."""
