"""What hostile sites and a curious server can do, measured on real sites and the real engine in one process."""
