variable "region" {
  description = "Region of everything."
  type        = string
  default     = "us-east-1"
}

variable "name" {
  description = "Name of the cluster, and the beginning of the names of all that belongs to it."
  type        = string
  default     = "shoal"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "Small letters, digits and dashes, 2 to 31 of them, a letter first."
  }
}

variable "kubernetes_version" {
  description = "Minor version of Kubernetes; Shoal's manifests are checked against 1.34 to 1.37."
  type        = string
  default     = "1.34"
}

variable "vpc_id" {
  description = "The network that the cluster is put into."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets of that network, in at least two zones, with a way out to the internet or to the registry."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) >= 2
    error_message = "EKS wants subnets in at least two zones."
  }
}

variable "admin_cidrs" {
  description = "Addresses from which the cluster's API may be reached; none: only from inside the network."
  type        = list(string)
  default     = []
}

variable "gpu_instance_type" {
  description = "Machine with GPUs, such as p5.48xlarge (8 H100, 32 network cards) or g6.12xlarge (4 L4)."
  type        = string
  default     = "p5.48xlarge"
}

variable "gpu_subnet_id" {
  description = "The one subnet of the GPU machines: near each other, in the zone that has them; empty: the first."
  type        = string
  default     = ""
}

variable "gpu_nodes" {
  description = "GPU machines: at least, at most, and at the beginning."
  type = object({
    min     = number
    max     = number
    desired = number
  })
  default = { min = 0, max = 4, desired = 0 }
}

variable "capacity_type" {
  description = "ON_DEMAND, SPOT, or CAPACITY_BLOCK (with capacity_reservation_id)."
  type        = string
  default     = "ON_DEMAND"

  validation {
    condition     = contains(["ON_DEMAND", "SPOT", "CAPACITY_BLOCK"], var.capacity_type)
    error_message = "ON_DEMAND, SPOT or CAPACITY_BLOCK."
  }
}

variable "capacity_reservation_id" {
  description = "The reservation that the GPU machines are taken from; empty: none."
  type        = string
  default     = ""
}

variable "efa_interfaces" {
  description = "EFA network cards of a GPU machine (32 for p5.48xlarge, 4 for p4d.24xlarge, 1 for g6.12xlarge; 0: plain network)."
  type        = number
  default     = 32
}

variable "disk_gb" {
  description = "Disk of a GPU machine: images, caches, scratch."
  type        = number
  default     = 500
}
