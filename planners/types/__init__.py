"""The values every floor speaks in: ids, units, layouts, snapshots, plans, events, errors. Standard library only."""
