"""The control loop: launches attempts, supervises and finishes them."""
