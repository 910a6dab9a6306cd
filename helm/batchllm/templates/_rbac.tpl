{{/* What Airflow may do in the namespace of the pods: nothing but this. */}}

{{- define "batchllm.rules.worker" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [create, get, list, watch, patch, delete]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [list]
{{- if .Values.connections.createSecrets }}
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, get, patch, delete]
{{- end }}
{{- end -}}

{{- define "batchllm.rules.triggerer" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [list]
{{- end -}}
