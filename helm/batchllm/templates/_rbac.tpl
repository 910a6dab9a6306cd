{{/* All rights that Airflow, and Spark's driver, get in the pods' namespace. */}}

{{- define "batchllm.rules.worker" -}}
- apiGroups: [batch]
  resources: [jobs]
  verbs: [create, get, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: {{ if .Values.spark.enabled }}[get, list, patch, delete]{{ else }}[list, patch, delete]{{ end }}
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [list]
{{- if .Values.connections.createSecrets }}
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, delete]
{{- end }}
{{- if .Values.spark.enabled }}
- apiGroups: [sparkoperator.k8s.io]
  resources: [sparkapplications]
  verbs: [create, delete]
- apiGroups: [sparkoperator.k8s.io]
  resources: [sparkapplications/status]
  verbs: [get]
{{- end }}
{{- end -}}

{{/* What Spark documents for a driver: executors, their settings, its own address. */}}
{{- define "batchllm.rules.spark" -}}
- apiGroups: [""]
  resources: [pods, services, configmaps, persistentvolumeclaims]
  verbs: [create, get, list, watch, patch, delete, deletecollection]
{{- end -}}

{{- define "batchllm.rules.triggerer" -}}
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, patch, delete]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [list]
{{- end -}}
