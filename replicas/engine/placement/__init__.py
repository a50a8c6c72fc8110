"""What SLOs ask of an instance: prompts that wait, layers that live on the host, requests that pause."""
