"""The demo model over several processes: heads split over tensor-parallel ranks, layers over stages."""
