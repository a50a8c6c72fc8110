"""SLOs at an ingress: deposits of paced streams, requests that would come too late, attainment."""
