"""How memory is come by: always through lowtide."""
