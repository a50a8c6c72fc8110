"""Ray Serve's HAProxy, guarded: time-outs, limits, no open statistics, no life after its parent."""
