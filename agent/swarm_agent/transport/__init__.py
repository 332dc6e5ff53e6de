"""How agents reach one another: gossip packets over UDP and the peer channel over HTTP, both sealed."""
